"""What makes files of the chart and of the images; none of it is in the packaged chart.

boards          dashboards, alert rules and the runbook       python -m helm.make.boards
values_schema   values.schema.json and the table of values    python -m helm.make.values_schema
requirements    the images' requirements, by hash             python -m helm.make.requirements
pins            the digests of others' images                 python -m helm.make.pins
"""
