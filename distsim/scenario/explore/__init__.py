"""Exploration: which orders of a program's operations there are, and under which of them it fails."""
