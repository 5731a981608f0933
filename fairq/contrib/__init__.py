"""At home in frameworks, one package each. Nothing else of fairq imports these."""
