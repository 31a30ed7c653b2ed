"""What a run leaves behind: its recording, written off the hub's loop, and read again at any place."""
