"""Tests of the gateway against scripted engines on real sockets."""
