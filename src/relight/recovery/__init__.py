"""Who notices what died."""
