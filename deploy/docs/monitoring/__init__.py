"""What Prometheus and Grafana read: dashboards, recording rules and alerts, from tables."""
