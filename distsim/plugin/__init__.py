"""What the pytest plugin does once a test asks for it; `distsim.pytest_plugin` is the door."""
