"""Real data sets as facts: the files of their official distributions, and where those are had.

A size or checksum is given only where several public sources agree on it, so `None` and `()` mean: not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FileSpec:
    """What is known of a file: its length and the checksums it may have (md5 or sha256, told by their length)."""

    size: int | None = None
    digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Remote:
    """A file to download; archives are unpacked into the folder."""

    url: str
    spec: FileSpec = FileSpec()
    folder: str = ""  # below the data folder

    @property
    def name(self) -> str:
        return self.url.split("?")[0].rsplit("/", 1)[-1].replace("+", " ")


@dataclass(frozen=True)
class Layout:
    """One way a distribution lies on disk: a folder and what must be in it (a file may also end in .gz)."""

    folder: str
    files: Mapping[str, FileSpec]


@dataclass(frozen=True)
class Entry:
    """A data set: its layouts by name, the first being what a download gives, and where to get it."""

    title: str
    layouts: Mapping[str, Layout]
    remotes: tuple[Remote, ...] = ()
    by_hand: str = ""  # how to get it where there is nothing to download


def _here(folder: str, *names: str) -> Layout:
    """A layout of which only the names are known."""
    return Layout(folder, dict.fromkeys(names, FileSpec()))


@dataclass(frozen=True)
class _Idx:
    """The four idx files of MNIST and of what imitates it: gzip lengths and md5, plain md5 where known."""

    gzipped: tuple[tuple[int, str], ...]
    plain: tuple[str, ...] = field(default=("", "", "", ""))

    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)

    def layout(self, folder: str) -> Layout:
        plain = zip(self.names, self.sizes, self.plain, strict=True)
        gzipped = zip(self.names, self.gzipped, strict=True)
        files = {n: FileSpec(s, (p,) if p else ()) for n, s, p in plain}
        return Layout(folder, files | {f"{n}.gz": FileSpec(s, (md5,)) for n, (s, md5) in gzipped})

    def remotes(self, base: str, folder: str) -> tuple[Remote, ...]:
        return tuple(
            Remote(f"{base}{n}.gz", FileSpec(s, (md5,)), folder)
            for n, (s, md5) in zip(self.names, self.gzipped, strict=True)
        )


_MNIST = _Idx(
    (
        (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
)
_FASHION = _Idx(
    (
        (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        (4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    )
)
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_ZENODO = "https://zenodo.org/records/10519652/files/"

_CIFAR10_BINARY = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
_CIFAR10_PYTHON = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
_CIFAR100_PYTHON = {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"}


def _medmnist(title: str, name: str, md5: str) -> Entry:
    """The file is not checked on disk: copies with the same images under other names are read too."""
    remote = Remote(f"{_ZENODO}{name}.npz?download=1", FileSpec(None, (md5,)))
    return Entry(title, {"npz": _here("", f"{name}.npz")}, (remote,))


_LEAF = (
    "LEAF (https://github.com/TalwalkarLab/leaf) has no ready files: run its data/{0}/preprocess.sh "
    "and copy data/{0}/data here as {0}/, so that {0}/train/*.json and {0}/test/*.json exist"
)

CATALOGUE: dict[str, Entry] = {
    "mnist": Entry(
        "MNIST",
        {"raw": _MNIST.layout("MNIST/raw"), "plain": _MNIST.layout("mnist")},
        (
            *_MNIST.remotes("https://ossci-datasets.s3.amazonaws.com/mnist/", "MNIST/raw"),  # the authors' site refuses
            Remote(
                f"{_QMNIST}qmnist-train-labels-idx2-int.gz",
                FileSpec(None, ("0058f8dd561b90ffdd0f734c6a30e5e4",)),
                "MNIST/raw",
            ),
            Remote(
                f"{_QMNIST}qmnist-test-labels-idx2-int.gz",
                FileSpec(None, ("5b5b05890a5e13444e108efe57b788aa",)),
                "MNIST/raw",
            ),
        ),
    ),
    "fmnist": Entry(
        "Fashion-MNIST",
        {"raw": _FASHION.layout("FashionMNIST/raw"), "plain": _FASHION.layout("fashion-mnist")},
        _FASHION.remotes("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", "FashionMNIST/raw"),
    ),
    "cifar10": Entry(
        "CIFAR-10",
        {
            "binary": Layout(
                "cifar-10-batches-bin", {n: FileSpec(30_730_000, (m,)) for n, m in _CIFAR10_BINARY.items()}
            ),
            "python": Layout("cifar-10-batches-py", {n: FileSpec(None, (m,)) for n, m in _CIFAR10_PYTHON.items()}),
        },
        (Remote(f"{_CIFAR}cifar-10-binary.tar.gz", FileSpec(170_052_171, ("c32a1d4ab5d03f1284b67883e8d87530",))),),
    ),
    "cifar100": Entry(
        "CIFAR-100",
        {
            "binary": Layout(
                "cifar-100-binary", {"train.bin": FileSpec(153_700_000), "test.bin": FileSpec(30_740_000)}
            ),
            "python": Layout("cifar-100-python", {n: FileSpec(None, (m,)) for n, m in _CIFAR100_PYTHON.items()}),
        },
        (Remote(f"{_CIFAR}cifar-100-binary.tar.gz", FileSpec(168_513_733, ("03b5dce01913d631647c71ecec9e9cb8",))),),
    ),
    "cinic10": Entry(
        "CINIC-10",
        {"folder": _here("CINIC-10", "train", "valid", "test")},
        (
            Remote(
                "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                FileSpec(687_544_992, ("6ee4d0c996905fe93221de577967a372",)),
                "CINIC-10",
            ),
        ),
    ),
    "mini-imagenet": Entry(
        "mini-ImageNet",
        {
            "csv": _here("mini-imagenet", "images", "train.csv", "val.csv", "test.csv"),
            "folder": _here("mini-imagenet", "train", "val", "test"),
        },
        by_hand="it is cut from ImageNet, whose licence forbids passing it on: make it from your own copy "
        "(Ravi and Larochelle's train.csv, val.csv, test.csv name the 600 images of each of the 100 classes)",
    ),
    "femnist": Entry(
        "FEMNIST (LEAF)",
        {"leaf": _here("femnist", "train", "test"), "leaf-data": _here("femnist/data", "train", "test")},
        by_hand=_LEAF.format("femnist"),
    ),
    "shakespeare": Entry(
        "Shakespeare",
        {
            "leaf": _here("shakespeare", "train", "test"),
            "leaf-data": _here("shakespeare/data", "train", "test"),
            "roles": _here("shakespeare", "roles.json"),
        },
        by_hand=_LEAF.format("shakespeare")
        + '; or write shakespeare/roles.json, a list of {"play", "role", "speeches": [text, ...]}',
    ),
    "har": Entry(
        "UCI HAR",
        {
            "signals": _here(
                "UCI HAR Dataset",
                *(f"{s}/{f}_{s}.txt" for s in ("train", "test") for f in ("y", "subject")),
                "train/Inertial Signals",
                "test/Inertial Signals",
            ),
            "features": _here(
                "UCI HAR Dataset", *(f"{s}/{f}_{s}.txt" for s in ("train", "test") for f in ("y", "subject", "X"))
            ),
        },
        (
            Remote(
                "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip",
                FileSpec(None, ("c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031",)),
            ),
        ),
    ),
    "wisdm": Entry(
        "WISDM v1.1, transformed",
        {
            "arff": _here("WISDM_ar_v1.1", "WISDM_ar_v1.1_transformed.arff"),
            "npz": _here("", "wisdm.npz"),
        },
        (Remote("https://www.cis.fordham.edu/wisdm/includes/datasets/latest/WISDM_ar_latest.tar.gz"),),
    ),
    "pneumoniamnist": _medmnist("PneumoniaMNIST", "pneumoniamnist", "28209eda62fecd6e6a2d98b1501bb15f"),
    "pathmnist": _medmnist("PathMNIST", "pathmnist", "a8b06965200029087d5bd730944a56c1"),
    "octmnist": _medmnist("OCTMNIST", "octmnist", "c68d92d5b585d8d81f7112f81e2d0842"),
    "tissuemnist": _medmnist("TissueMNIST", "tissuemnist", "ebe78ee8b05294063de985d821c1c34b"),
}
