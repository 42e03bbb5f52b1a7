"""What the processes of a simulated fleet really have, beside what they report."""
