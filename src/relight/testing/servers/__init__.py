"""Real servers for tests, started from wheels or Debian's packages: no docker, no root, nothing left behind."""
