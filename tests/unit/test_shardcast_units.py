"""Parts of shardcast without sockets: manifests, stores, mailboxes, messages, scheduling structures."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardcast.files
from protocol.errors import ConfigError, Fault, Ignore, Reason, Reject
from shardcast import wire
from shardcast.content import ContentDir, NotFound, sha256
from shardcast.fetch import _Pool
from shardcast.folder import SHARD_SIZE_DEFAULT, build_manifest, choose_shard_size
from shardcast.manifest import (
    FILES_MAX,
    MANIFEST_BYTES_MAX,
    SHARD_SIZE_MAX,
    SHARDS_MAX,
    SIZE_MAX,
    check_name,
    content_hash,
    read_manifest,
    verify_manifest,
)
from shardcast.server import TokenBucket
from shardcast.sockets import QUEUE_MESSAGES_MAX, curve_public
from shardcast.store import ShardStore
from tests.support.shardcast_kit import DOMAIN, SHARD, TRAINER, fill, make_folder, make_manifest

KEY, SENDER = b"\x01" * 32, b"\x02" * 32


def test_bounds_fit_each_other() -> None:
    assert SHARD_SIZE_MAX * SHARDS_MAX >= SIZE_MAX, "the largest policy can be described"
    assert SHARDS_MAX * 34 + FILES_MAX * 200 < MANIFEST_BYTES_MAX, "and its manifest is not too long"
    assert wire.FRAME_BYTES_MAX > wire.CHUNK_BYTES > SHARDS_MAX // 8, "a bitmap fits a frame"
    assert wire.PUT_CREDITS < QUEUE_MESSAGES_MAX
    assert choose_shard_size(1) == SHARD_SIZE_DEFAULT
    assert choose_shard_size(SIZE_MAX) * SHARDS_MAX >= SIZE_MAX


def test_manifest_says_what_the_folder_holds(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", num_shards=3)
    (folder / "empty.json").write_bytes(b"")
    manifest = make_manifest(folder, version=4, parent=3, epoch=2)
    again = verify_manifest(manifest.data, TRAINER.public, DOMAIN)
    assert again.body == manifest.body == read_manifest(manifest.data).body
    assert manifest.hash == sha256(manifest.data)
    assert [file.name for file in manifest.body.files] == ["config.json", "empty.json", "model.safetensors"]
    assert [len(file.shards) for file in manifest.body.files] == [1, 0, 3]
    assert list(manifest.shards.values())[1:] == [SHARD, SHARD, SHARD - 100]
    assert manifest.root == content_hash(reversed(manifest.body.files)), "order does not matter"


def test_content_hash_separates_name_size_and_bytes(tmp_path: Path) -> None:
    roots = set()
    for number, (name, data) in enumerate((("a", b"bc"), ("ab", b"c"), ("a", b"b"), ("b", b"bc"), ("a", b""))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(data)
        roots.add(make_manifest(folder).root)
    assert len(roots) == 5


def test_build_manifest_refuses_what_receivers_would(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    with pytest.raises(ConfigError, match="shard_size"):
        build_manifest(folder, TRAINER, DOMAIN, version=1, shard_size=1)
    with pytest.raises(Reject, match="parent"):
        make_manifest(folder, version=1, parent=1)
    with pytest.raises(Reject, match="file type"):
        make_manifest(folder, allowed_suffixes=(".safetensors",))
    (folder / "link").symlink_to(folder / "config.json")
    with pytest.raises(ConfigError, match="not a plain file"):
        make_manifest(folder)
    (folder / "link").unlink()
    (folder / "sub").mkdir()
    with pytest.raises(ConfigError, match="not a plain file"):
        make_manifest(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="0 files"):
        make_manifest(tmp_path / "none")


@given(st.text(min_size=1, max_size=70))
def test_accepted_names_name_a_file_inside_a_folder(name: str) -> None:
    try:
        check_name(name)
    except Reject:
        return
    assert Path("/a", name).parts == ("/", "a", name)
    assert os.path.normpath(f"/a/{name}") == f"/a/{name}"
    assert name.isascii()
    assert name.isprintable()


def test_store_keeps_only_what_matches_its_hash(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "s") as store:
        digest = store.put(b"hello")
        with pytest.raises(Reject) as caught:
            store.put(b"hellp", sha256(b"other"))
        assert caught.value.reason is Reason.SHARD
        assert store.get(digest) == b"hello"
        assert store.read(digest, 1, 3) == (5, b"ell")
        with pytest.raises(NotFound):
            store.get(sha256(b"other"))
    shards = tmp_path / "s" / "shards"
    (shards / sha256(b"x").hex()).write_bytes(b"y")
    (shards / "README").write_bytes(b"z")
    (tmp_path / "s" / "tmp" / "half").write_bytes(b"w")
    with ShardStore(tmp_path / "s") as store:
        assert store.has(digest)
        assert store.bytes_total == 5
        assert [path.name for path in shards.iterdir()] == [digest.hex()]
        assert list((tmp_path / "s" / "tmp").iterdir()) == []


def test_bytes_that_rot_are_found_when_read(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "s") as store:
        digest = store.put(b"hello")
        (tmp_path / "s" / "shards" / digest.hex()).write_bytes(b"hellp")
        with pytest.raises(Fault, match="changed on disk"):
            store.get(digest)
        assert not store.has(digest)
        gone = store.put(b"there")
        (tmp_path / "s" / "shards" / gone.hex()).unlink()
        with pytest.raises(NotFound, match="vanished"):
            store.read(gone, 0, 5)


def test_store_belongs_to_one_process(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "s"), pytest.raises(ConfigError, match="in use"):
        ShardStore(tmp_path / "s")
    ShardStore(tmp_path / "s").close()


def test_collect_spares_kept_and_pinned(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "s") as store:
        kept, pinned, loose = (store.put(data) for data in (b"kept", b"pinned", b"loose!"))
        with store.pin([pinned]), store.pin([pinned]):
            assert store.collect({kept}) == len(b"loose!")
        assert [store.has(digest) for digest in (kept, pinned, loose)] == [True, True, False]
        assert store.collect({kept}) == len(b"pinned")
        assert store.bytes_total == len(b"kept")


def test_store_bound_is_kept(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "s", bytes_max=10) as store:
        store.put(b"12345678")
        with pytest.raises(Fault, match="store is full"):
            store.put(b"901")
        store.put(b"12345678")
        store.put(b"90")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "open"])
def test_disk_errors_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str) -> None:
    root = tmp_path / "s"
    with ShardStore(root) as store:
        first = store.put(b"first")
        store.mail.put(SENDER, KEY, b"letter")

        def fail(*args: object) -> None:
            raise OSError(code, "injected")

        monkeypatch.setattr(shardcast.files.os, call, fail)
        with pytest.raises(Fault, match="nothing that was stored is lost"):
            store.put(b"second")
        with pytest.raises(Fault):
            store.mail.put(SENDER, b"\x05" * 32, b"another")
        monkeypatch.undo()
        assert list((root / "tmp").iterdir()) == []
        assert not store.has(sha256(b"second"))
        with pytest.raises(NotFound):
            store.mail.get(b"\x05" * 32)
        assert store.get(first) == b"first"
        store.put(b"second")
        store.mail.put(SENDER, b"\x05" * 32, b"another")
    with ShardStore(root) as store:
        assert store.bytes_total == 11
        assert store.mail.get(KEY) == b"letter"


def test_assemble_is_repeatable_and_refuses_another_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy")
    (folder / "0").write_bytes(b"named like a draft")
    (folder / "2").write_bytes(b"")
    manifest = make_manifest(folder)
    with ShardStore(tmp_path / "s") as store:
        fill(store, manifest, folder)
        target = store.assemble(manifest, tmp_path / "out" / "v1")
        assert {path.name: path.read_bytes() for path in target.iterdir()} == {
            path.name: path.read_bytes() for path in folder.iterdir()
        }
        assert store.assemble(manifest, target) == target
        assert [path.name for path in target.parent.iterdir()] == ["v1"], "no draft is left"
        (target / "config.json").write_bytes(b"{}")
        with pytest.raises(Fault, match=r"differs from its manifest at config\.json"):
            store.assemble(manifest, target)
        store.collect(set(list(manifest.shards)[1:]))
        with pytest.raises(NotFound):
            store.assemble(manifest, tmp_path / "out" / "v2")
        assert [path.name for path in target.parent.iterdir()] == ["v1"]
        with pytest.raises(Fault, match="differs"):
            store.add_folder(manifest, target)


def test_accepted_manifests_survive_and_old_ones_can_be_wanted(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", num_shards=1)
    manifests = [make_manifest(folder, version=version) for version in range(3)]

    def admit(store: ShardStore, version: int, **kwargs: bool) -> None:
        manifest = manifests[version]
        store.admit_manifest(manifest.data, TRAINER.public, DOMAIN, expected=manifest.hash, **kwargs)

    with ShardStore(tmp_path / "s") as store:
        admit(store, 2)
        with pytest.raises(Reject, match="rollback"):
            admit(store, 1)
        admit(store, 1, historic=True)
        admit(store, 2)
    with ShardStore(tmp_path / "s") as store:
        assert store.highest_version(manifests[0].task, TRAINER.public) == 2
        assert {manifest.version for manifest in store.manifests()} == {1, 2}
        assert store.manifest(manifests[1].hash).data == manifests[1].data
        assert store.read(manifests[1].hash, 0, 4) == (len(manifests[1].data), manifests[1].data[:4])
        with pytest.raises(NotFound):
            store.manifest(manifests[0].hash)


def test_damaged_ratchet_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    manifest = make_manifest(make_folder(tmp_path / "policy", num_shards=1))
    with ShardStore(tmp_path / "s") as store:
        store.admit_manifest(manifest.data, TRAINER.public, DOMAIN, expected=manifest.hash)
    [head] = (tmp_path / "s" / "heads").iterdir()
    head.write_bytes(b"")
    with pytest.raises(Fault, match="is damaged"):
        ShardStore(tmp_path / "s")


def test_bitmap_marks_what_is_here(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "policy", num_shards=20)
    manifest = make_manifest(folder)
    with ShardStore(tmp_path / "s") as store:
        fill(store, manifest, folder)
        digests = list(manifest.shards)
        store.collect({digests[0], digests[9], digests[20]})
        assert store.bitmap(manifest) == bytes([1, 2, 16])
        assert store.missing(manifest) == [digests[i] for i in range(21) if i not in (0, 9, 20)]


def test_mailbox_quota_is_per_sender_and_comes_back(tmp_path: Path) -> None:
    with ShardStore(tmp_path / "s", mail_bytes_max=25, mail_sender_bytes_max=15) as store:
        mail = store.mail
        mail.put(SENDER, b"\x01" * 32, b"0123456789")
        mail.put(SENDER, b"\x01" * 32, b"0123456789")
        with pytest.raises(Reject, match="your quota"):
            mail.put(SENDER, b"\x02" * 32, b"012345")
        mail.put(b"\x03" * 32, b"\x02" * 32, b"0123456789")
        with pytest.raises(Reject, match="mailbox is full"):
            mail.put(b"\x04" * 32, b"\x03" * 32, b"012345")
        with pytest.raises(Reject, match="duplicate"):
            mail.put(b"\x04" * 32, b"\x02" * 32, b"x")
        assert mail.collect(lambda key: key != b"\x01" * 32) == 1
        mail.put(SENDER, b"\x05" * 32, b"012345678912345")
    with ShardStore(tmp_path / "s", mail_bytes_max=25, mail_sender_bytes_max=15) as store:
        assert sorted(store.mail.keys()) == [b"\x02" * 32, b"\x05" * 32]
        assert store.mail.get(b"\x02" * 32) == b"0123456789", "equal bytes of a collected letter stay"
        with pytest.raises(Reject, match="your quota"):
            store.mail.put(SENDER, b"\x06" * 32, b"x")


def test_letters_without_index_or_bytes_are_removed_on_opening(tmp_path: Path) -> None:
    mail = tmp_path / "s" / "mail"
    with ShardStore(tmp_path / "s") as store:
        store.mail.put(SENDER, b"\x01" * 32, b"one")
        store.mail.put(SENDER, b"\x02" * 32, b"two")
        store.mail.put(SENDER, b"\x03" * 32, b"three")
    (mail / "index" / (b"\x01" * 32).hex()).unlink()
    (mail / "content" / sha256(b"two").hex()).write_bytes(b"tw0")
    (mail / "index" / "junk").write_bytes(b"\xff" * 1000)
    with ShardStore(tmp_path / "s") as store:
        assert store.mail.keys() == [b"\x03" * 32]
    assert [path.name for path in (mail / "content").iterdir()] == [sha256(b"three").hex()]


def test_concurrent_puts_of_one_blob_count_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    content = ContentDir(tmp_path / "c", tmp_path, bytes_max=10_000_000)
    blobs = [random.Random(i % 4).randbytes(50_000) for i in range(32)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: content.put(data, sha256(data)), blobs))
    assert content.bytes_total == 4 * 50_000


_messages = st.one_of(
    st.builds(
        wire.Get,
        st.integers(0, 2**32 - 1),
        st.integers(0, 1),
        st.binary(min_size=32, max_size=32),
        st.integers(0, 2**40),
    ),
    st.builds(wire.Have, st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32)),
)


@given(_messages)
def test_messages_round_trip(message: wire.Get | wire.Have) -> None:
    assert wire.unpack(wire.REQUESTS, wire.pack(message), 0) == message
    with pytest.raises(Reject):
        wire.unpack(wire.ANSWERS, wire.pack(message), 0)
    with pytest.raises(Reject):
        wire.unpack(wire.REQUESTS, wire.pack(message), 1)


@given(st.binary(max_size=300), st.integers(0, 2))
def test_any_header_is_a_message_or_a_reject(header: bytes, payloads: int) -> None:
    for table in (wire.REQUESTS, wire.ANSWERS):
        try:
            message = wire.unpack(table, header, payloads)
        except Reject:
            continue
        assert wire.pack(message) == header


@pytest.mark.parametrize(
    "error",
    [
        Reject(Reason.REPLAY, "what" * 500, observed=1, limit="2", todo="do"),
        Ignore("void"),
        Fault("full"),
        NotFound("gone"),
        wire.Busy("later"),
        wire.PeerTimeout("late"),
    ],
)
def test_errors_cross_the_wire(error: Reject | Ignore | Fault) -> None:
    answer = wire.unpack(wire.ANSWERS, wire.pack(wire.failed(7, error)), 0)
    assert isinstance(answer, wire.Failed)
    assert answer.id == 7
    back = wire.to_error(answer)
    assert type(back) is (Fault if isinstance(error, wire.PeerTimeout) else type(error))
    if isinstance(error, Reject) and isinstance(back, Reject):
        assert (back.reason, back.observed, back.limit, back.todo) == (error.reason, "1", "2", "do")
        assert len(back.what) == 512


def test_unknown_reasons_of_a_newer_peer_are_faults() -> None:
    assert type(wire.to_error(wire.Failed(1, 1, 9999, "?", "", "", ""))) is Fault


def test_token_bucket() -> None:
    bucket = TokenBucket(rate=10, burst=3, now=0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(0.1), bucket.take(0.1)] == [True, False]
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20))))
@settings(max_examples=50)
def test_pool_is_a_set(steps: list[tuple[bool, int]]) -> None:
    pool, model = _Pool(range(10)), set(range(10))
    for add, item in steps:
        (pool.add if add else pool.discard)(item)
        (model.add if add else model.discard)(item)
        assert set(pool.items()) == model
        assert len(pool) == len(model)
    assert set(pool.sample(random.Random(1), 100)) == model


def test_curve_public_is_the_x25519_key() -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    secret = random.Random(1).randbytes(32)
    assert curve_public(secret) == X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    with pytest.raises(ConfigError):
        curve_public(b"short")
