"""Dashboards and alert rules, described in Python and written to helm/: `python -m helm.make.boards`.

panels       what a dashboard is, and Grafana's JSON of it
dashboards   the dashboards: users' experience, the gateway, the fleet, the engine
alerts       the rules, what fires and what does not, and the runbook
metrics      the metrics that a query reads, and the labels that it reads them by
"""
