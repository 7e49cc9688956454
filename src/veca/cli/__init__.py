"""The `veca` command: one thin file per verb."""
