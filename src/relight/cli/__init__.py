"""The `relight` command. Nothing else imports this package, so that `import relight` loads neither typer nor rich."""
