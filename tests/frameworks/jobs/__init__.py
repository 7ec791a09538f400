"""Programs that tests start in processes of their own. They know nothing of this project, only paths."""
