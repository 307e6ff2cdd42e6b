"""Generator of the demo model's training dialogues. Python standard library only."""
