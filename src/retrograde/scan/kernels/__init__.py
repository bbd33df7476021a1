"""The compiled forms of :mod:`retrograde.scan.sweep`, each loaded when it is first used."""
