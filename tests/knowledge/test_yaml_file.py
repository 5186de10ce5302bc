"""Knowledge files: what is read, and how invalid files are refused."""

import pytest
import yaml

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.yaml_file import read_knowledge_file

GOOD = """\
version: 1
source: common knowledge
entities:
  realm:
    Avalon: {region: [North, West], de: Insel Avalon, zh: [阿瓦隆, 阿瓦]}
    "No": {region: West}
    Lyonesse:
  region: [North, West]
knowledge:
  realm: {family: attribute, language: en, template: "{} rules over", answers: realm}
  realm_zh: {family: cross_language, language: zh, template: "{}统治", answers: realm}
  greeting:
    family: simile
    language: en
    template: "{} says"
    answers: [hello, good morning]
    space: false
    printed: "{} say"
    paraphrases: ["As {} says:", "Says {}:"]
  motto: {family: attribute, language: en, templates: ["{} swears", "By {}"], answers: [oak, ash]}
"""


def test_a_good_file_is_read_as_written(write):
    path = write(GOOD)
    # Else the bad ones below could fail for another reason.
    assert len(Catalogue.load(path)) == len(Catalogue.load()) + 4
    file = read_knowledge_file(path)
    raw = yaml.safe_load(GOOD)  # the plain reader as a second opinion
    assert file.source == raw["source"]
    assert list(file.entities["realm"]) == list(raw["entities"]["realm"])
    assert list(file.entities["region"]) == raw["entities"]["region"]
    avalon = file.entities["realm"]["Avalon"]
    assert avalon.facts == {"region": ("North", "West")}
    assert avalon.texts("en") == ("Avalon",)
    assert avalon.texts("de") == ("Insel Avalon",)
    assert avalon.texts("zh") == ("阿瓦隆", "阿瓦")
    assert avalon.texts("fr") == ()
    assert file.entities["realm"]["Lyonesse"].facts == {}
    spaced = {name: knowledge.leading_space for name, knowledge in file.knowledge.items()}
    assert spaced == {"realm": True, "realm_zh": False, "greeting": False, "motto": True}
    greeting = file.knowledge["greeting"]
    assert [answer.text for answer in greeting.answers] == ["hello", "good morning"]
    assert greeting.printed_template == "{} say"
    assert greeting.templates == ("{} says",)
    assert list(greeting.paraphrases) == raw["knowledge"]["greeting"]["paraphrases"]
    motto = file.knowledge["motto"]
    assert (motto.template, list(motto.templates)) == ("{} swears", ["{} swears", "By {}"])
    assert motto.paraphrases == ()


def changed(old, new):
    assert GOOD.count(old) >= 1
    return GOOD.replace(old, new, 1)


BAD = {
    "empty file": ("", ["must be a mapping with the keys version"]),
    "broken yaml": (changed("[North, West]", "[North, West"), ["line"]),
    "a key twice": (
        changed("    Lyonesse:\n", "    Lyonesse:\n    Avalon: {region: North}\n"),
        ["line 8", "'Avalon'", "twice"],
    ),
    "unquoted No": (changed('"No":', "No:"), ["entities.realm", "in quotes, not False (bool)"]),
    "invisible": (changed("[oak,", '["o\\u00adak",'), ["motto.answers", "invisible SOFT HYPHEN"]),
    "language": (changed("language: en", "language: it"), ["realm.language", "'it'", "en, es, fr"]),
    "unknown key": (changed("space: false", "spaces: false"), ["greeting.spaces", "'space'"]),
    "no flag": (changed("space: false", "space: 0"), ["greeting.space", "of type bool, not 0"]),
    "no template": (changed('template: "{} rules over", ', ""), ["realm.template: is missing"]),
    "name with an arrow": (changed("  greeting:", "  a->b:"), ["a->b", "'->'"]),
    # What only shows when the file is put together with the others:
    "fact of unknown kind": (
        changed("region: West}", "regoin: West}"),
        ["realm.No.regoin", "neither a kind nor a language", "en, es, fr", "'region'"],
    ),
    "fact to an unknown entity": (
        changed("region: West}", "region: Wets}"),
        ["realm.No.region", "no region 'Wets'", "'West'"],
    ),
    "domain empty in its language": (
        changed("language: zh", "language: ja"),
        ["realm_zh.answers", "empty", "'ja'"],
    ),
    "one text for two": (
        changed('"No": {region: West}', '"No": {region: West, en: ["No", avalon]}'),
        ["knowledge.realm.answers", "'avalon' of 'No'", "'Avalon'", "alike"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_with_file_key_and_reason(case, write):
    text, fragments = BAD[case]
    path = write(text, "bad.yaml")
    with pytest.raises(KnowledgeError) as error:
        Catalogue.load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: "), message
    for fragment in fragments:
        assert fragment in message, message


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(KnowledgeError, match=r"gone\.yaml: cannot be read.*No such file[\w ]+\)$"):
        Catalogue.load(tmp_path / "gone.yaml")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("source: Übersee".encode("latin-1"))
    with pytest.raises(KnowledgeError, match=r"latin\.yaml: is not UTF-8"):
        Catalogue.load(latin)
