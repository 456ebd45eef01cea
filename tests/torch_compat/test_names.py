"""Entries for private names of torch: lookup, behaviour, and what is left out."""

from __future__ import annotations

from distsim.torch_compat import names
from distsim.torch_compat.names import FEATURE, GUARD, MISSING, OPTIONAL, TorchName


def test_an_attribute_of_a_module_that_a_function_hides_is_found() -> None:
    """torch.distributed.rendezvous is a function and a module: the entry means the module."""
    name = TorchName("torch.distributed.rendezvous._create_c10d_store", "stores")
    assert callable(name.get())
    assert name.holder().__name__ == "torch.distributed.rendezvous"


def test_a_missing_name_is_left_out_with_its_feature() -> None:
    """A release without the name costs a feature, which is on record, and no exception."""
    assert TorchName("torch.distributed._no_such_name", "groups that sing").get() is MISSING
    assert TorchName("torch._no_module.inner.Kind", "windows").get(3) == 3
    assert names.left_out == {
        "torch.distributed._no_such_name": "groups that sing",
        "torch._no_module.inner.Kind": "windows",
    }


def test_a_missing_optional_name_is_not_on_record() -> None:
    """Nothing is lost without it."""
    assert TorchName("torch._no_such_name", "haste", OPTIONAL).get() is MISSING
    assert names.left_out == {}


def test_a_name_that_behaves_otherwise_does_not_work() -> None:
    """A behaviour test that fails or raises counts as a missing name, and runs once."""
    runs = []

    def other() -> bool:
        runs.append(1)
        raise RuntimeError("another torch")

    name = TorchName("torch.Tensor", "tensors", FEATURE, test=other)
    assert name.exists()
    assert not name.works()
    assert not name.works()
    assert runs == [1]


def test_the_guard_needs_nothing_that_this_torch_lacks() -> None:
    """Every entry of need GUARD is met by the torch that the suite runs on."""
    assert names.unmet(GUARD) == []


def test_every_entry_says_what_it_is_for() -> None:
    """The table is read by `distsim doctor`: a feature each, a release each, paths unique and of torch."""
    for path, name in names.all_names().items():
        assert path.startswith("torch."), path
        assert name.feature, path
        assert name.since.count(".") == 1, path
        assert name.until is None or name.until.count(".") == 1, path


def test_a_name_of_a_later_release_is_not_left_out() -> None:
    """This torch never had what it is about: no feature is missing."""
    TorchName("torch.distributed.Hook._attach", "hooks of 99.0", FEATURE, since="99.0").get()
    assert names.left_out == {}
