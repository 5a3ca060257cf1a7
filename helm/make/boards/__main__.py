"""Write the dashboards, the rules and the runbook to helm/."""

from __future__ import annotations

from helm.make.boards.files import contents

if __name__ == "__main__":
    for path, text in contents().items():
        path.write_text(text)
