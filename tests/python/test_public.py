"""The public surface, and what importing it costs."""

import subprocess
import sys

import torchrec_embcache

PUBLIC_WITHOUT_TORCHREC = {
    "CacheTable",
    "EmbCacheEmbedding",
    "EmbCacheEmbeddingBag",
    "EmbCacheError",
    "EmbCacheWarning",
    "FoundRows",
    "RowChunk",
    "RowMetadata",
    "SsdStats",
    "TableStats",
    "TierBudgets",
    "TierStats",
    "cache_modules",
    "exceptions",
    "flush",
    "initializers",
    "optimizers",
}


def test_the_public_names_are_all_there_and_sorted():
    assert torchrec_embcache.__all__ == sorted(torchrec_embcache.__all__)
    assert set(torchrec_embcache.__all__) == PUBLIC_WITHOUT_TORCHREC | set(torchrec_embcache._LAZY)
    for name in torchrec_embcache.__all__:
        assert getattr(torchrec_embcache, name) is not None
        assert name in dir(torchrec_embcache)


def test_importing_and_training_without_torchrec_imports_no_torchrec():
    script = (
        "import sys, torch, torchrec_embcache as e\n"
        "bag = e.EmbCacheEmbeddingBag(name='a', embedding_dim=2, tiers=e.TierBudgets(host_bytes='1MiB'),\n"
        "                             optimizer=e.optimizers.SGD(lr=1.0))\n"
        "bag(torch.tensor([[1]])).sum().backward()\n"
        "assert len(bag) == 1\n"
        "print(sorted(set(sys.modules) & {'torchrec', 'fbgemm_gpu', 'torch.distributed.checkpoint'}))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"
