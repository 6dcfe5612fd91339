"""Builds whose sources change between the plan and the reading."""

from retrieve_spec.datastore import build
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.inspection import verify_datastore


def planned_then(damage, sources, tokenizer, store, monkeypatch):
    """Report of a build whose sources are damaged once it has planned what to read."""
    grow = build.grow

    def damaged(*arguments, **options):
        damage()
        return grow(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(build, "grow", damaged)
        report = build_datastore(store, sources, tokenizer, workers=1)
    verify_datastore(store)
    return report
