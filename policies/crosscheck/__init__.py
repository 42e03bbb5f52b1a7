"""Cross-checks: an idle engine answers a finished request again, and the answers are compared."""
