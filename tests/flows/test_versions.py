"""Code that changed under a run: fingerprints, other steps than recorded, flows that are gone."""
