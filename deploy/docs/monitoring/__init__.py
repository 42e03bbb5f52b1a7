"""What Prometheus and Grafana read: dashboards, from tables."""
