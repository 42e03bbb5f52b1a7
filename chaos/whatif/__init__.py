"""What-if with continuation: from the first decision that other settings would change, the
simulator continues twice, with the recorded settings and with the changed ones."""
