"""The main job: training runs with a folder that holds everything, and the freedom to stop and go on."""
