"""What each event does: functions from a state and an event to the next state."""
