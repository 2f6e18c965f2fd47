"""foreach: per-item progress, kept while the items still match."""
