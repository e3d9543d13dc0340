"""Pipeline schedules, where a model is cut into stages, and which worker holds which stage."""
