"""What builds, generates and checks the documentation."""
