"""What Relight is measured against: other engines, each in its own file, and SQLite alone (`raw`)."""
