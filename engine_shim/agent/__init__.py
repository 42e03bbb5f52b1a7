"""The agent of one worker: supervises the engine, reports, journals, carries out effects."""
