"""The `relight` command. Nothing else imports this package, so that the library works without typer and rich, which come with the
extra `cli`."""
