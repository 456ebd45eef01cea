"""The door for programs: JSON Schemas of the reports, and the commands as tools of agents."""
