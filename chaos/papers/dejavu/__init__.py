"""DéjàVu's published results beside ours."""
