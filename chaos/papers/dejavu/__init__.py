"""DéjàVu's published results, compared with ours."""
