"""Integrations with frameworks, one package each. Nothing else in fairq imports them."""
