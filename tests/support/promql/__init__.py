"""The part of PromQL that our rules and dashboards use, evaluated without Prometheus.

It knows no service and no test. `promtool` evaluates the same cases where it is installed.
"""
