"""The promises about single decisions."""
