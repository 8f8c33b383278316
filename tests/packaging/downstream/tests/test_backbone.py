from astuner_older.backbone import OlderBackbone
from astuner.testing import check_backbone, fake_config, make_tokenizer


def test_backbone(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "model")
    config = fake_config(tmp_path, overrides=[f"astuner.model.path={tmp_path / 'model'}"])
    check_backbone(OlderBackbone, config)
