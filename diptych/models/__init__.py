"""Finding, fetching and importing models. No torch before an import needs it."""
