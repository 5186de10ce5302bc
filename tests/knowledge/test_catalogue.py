"""The catalogue: several files together, relations and selections."""

import pytest

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge import Answer, Catalogue

WORLD = """\
version: 1
entities:
  realm:
    Avalon:
      {en: [Avalon, Isle of Apples], region: [North, West], coin: Mark, zh: 阿瓦隆, de: Apfelinsel}
    Camelot: {region: West, zh: 卡美洛}
    Lyonesse: {}
  region: {North: {de: Norden}, West: {zh: 西方}, South: {de: Süden, zh: 南方}}
  coin: [Mark, Crown]
knowledge:
  realm: {family: attribute, language: en, template: "{} rules over", answers: realm}
  home: {family: attribute, language: en, template: "{} was born in", answers: realm}
  region: {family: attribute, language: en, template: "{} lives in the", answers: region}
  coin: {family: attribute, language: en, template: "{} pays with a", answers: coin}
  realm_zh: {family: cross_language, language: zh, template: "{}统治", answers: realm}
  region_zh: {family: cross_language, language: zh, template: "{}住在", answers: region}
  realm_de: {family: cross_language, language: de, template: "{} regiert", answers: realm}
  sort: {family: simile, language: en, template: "{} is", answers: [North, big]}
"""


@pytest.fixture
def catalogue(write):
    return Catalogue.load(write(WORLD, "world.yaml"))


def test_a_domain_is_every_name_in_its_language(catalogue):
    def answers(name):
        return [(answer.identity, answer.text) for answer in catalogue[name].answers]

    avalon = [("Avalon", "Avalon"), ("Avalon", "Isle of Apples")]
    assert answers("realm") == [*avalon, ("Camelot", "Camelot"), ("Lyonesse", "Lyonesse")]
    assert answers("realm_zh") == [("Avalon", "阿瓦隆"), ("Camelot", "卡美洛")]
    assert catalogue["realm_zh"].leading_space is False
    assert catalogue["realm"].prompt("{} of {}") == "{} of {} rules over"
    assert catalogue["realm"].kind == catalogue["home"].kind == "realm"


@pytest.mark.parametrize(
    ("name", "reference"),
    {
        "realm->region": {"Avalon": {"North", "West"}, "Camelot": {"West"}},
        "home->region": {"Avalon": {"North", "West"}, "Camelot": {"West"}},
        # Only facts that have a name in the target's language count.
        "realm->region_zh": {"Avalon": {"West"}, "Camelot": {"West"}},
        "realm_de->region_zh": {"Avalon": {"West"}},
        "realm->realm_zh": {"Avalon": {"Avalon"}, "Camelot": {"Camelot"}},
        "realm_zh->realm_de": {"Avalon": {"Avalon"}},
        "region->realm": None,
        "realm->home": None,
        "X+1->X+2": {str(n): {str(n + 1)} for n in range(10)},
    }.items(),
)
def test_references(catalogue, name, reference):
    relation = catalogue.relation(name)
    assert relation.name == name
    assert relation.reference == reference


def test_files_build_on_each_other(write):
    first = write(WORLD, "world.yaml")
    second = write(
        "version: 1\n"
        "entities:\n"
        "  realm: {Avalon: {climate: mild, fr: Avallon}, Camelot: {en: [Camelot, Caer]},\n"
        "    Lyonesse: , Logres: {region: South, climate: wet}}\n"
        "  climate: [mild, wet]\n"
        "knowledge:\n"
        "  climate: {family: attribute, language: en, template: '{} likes it', answers: climate}\n"
    )
    for order in ((first, second), (second, first)):
        both = Catalogue.load(*order)
        identities = {answer.identity for answer in both["realm"].answers}
        assert identities == {"Avalon", "Camelot", "Lyonesse", "Logres"}
        assert Answer("Camelot", "Caer") in both["realm"].answers
        assert both.relation("realm->climate").reference == {"Avalon": {"mild"}, "Logres": {"wet"}}
        assert both.relation("realm->region").reference["Logres"] == {"South"}
        assert both.relation("realm->region").reference["Avalon"] == {"North", "West"}


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "knowledge: {realm: {family: simile, language: en, template: '{} is', answers: realm}}": (
            r"knowledge\.realm.*already taken by .*world\.yaml"
        ),
        "entities: {realm: {Avalon: {region: South}}}": r"realm\.Avalon\.region.*already given",
        "entities: {realm: {Isle of Apples: {coin: Mark}}}": (
            r"world\.yaml: knowledge\.realm.*mine\.yaml.* and 'Isle of Apples' of 'Avalon'"
        ),
        "entities: {port: {Tintagel: {realm: Isle of Apples}}}": (
            r"port\.Tintagel\.realm.*Did you mean 'Avalon'"
        ),
    }.items(),
)
def test_files_must_not_contradict_each_other(write, text, message):
    world, mine = write(WORLD, "world.yaml"), write(f"version: 1\n{text}\n")
    with pytest.raises(KnowledgeError, match=message):
        Catalogue.load(world, mine)


def test_unknown_names_get_near_matches(catalogue):
    assert "realm" in catalogue and catalogue.get("raelm") is None
    with pytest.raises(KnowledgeError, match=r"'Region'.*'region'"):
        catalogue.select(["realm", "Region"])
    with pytest.raises(KnowledgeError, match=r"'qqq'\. Known: all, attribute, .*realm"):
        catalogue["qqq"]
    with pytest.raises(KnowledgeError, match=r"'realm->regio'.*'regio'.*'region'"):
        catalogue.relation("realm->regio")


def test_a_relation_is_written_with_one_arrow(catalogue):
    assert catalogue.relation(" realm -> region ").name == "realm->region"
    for name in ("realm", "->region", "realm->region->coin"):
        with pytest.raises(KnowledgeError, match="write source->target, such as city->country"):
            catalogue.relation(name)


def test_select_keeps_order_and_takes_each_once(catalogue):
    families = list(dict.fromkeys(knowledge.family for knowledge in catalogue.values()))
    assert families == ["attribute", "cross_language", "simile", "math", "control"]

    def names(*wanted):
        return [knowledge.name for knowledge in catalogue.select(wanted)]

    assert names("coin", "realm", "coin") == ["coin", "realm"]
    assert names("cross_language", "realm")[-4:] == ["realm_zh", "region_zh", "realm_de", "realm"]
    assert names("X*2", "math")[:3] == ["X*2", "X+1", "X+2"]
    assert len(names("math")) == 16
    assert names("all") == list(catalogue)
    assert names() == []
    assert [knowledge.name for knowledge in catalogue.select("coin, realm")] == ["coin", "realm"]


def test_a_simile_shares_only_what_it_is_alike_in(catalogue, write):
    assert catalogue.relation("object_color->simile_color").reference["fridge"]
    assert catalogue.relation("object_color->simile_price").reference is None
    assert catalogue.relation("fruit_color->simile_color").reference["banana"] >= {"yellow"}
    assert catalogue.relation("name_country->country").reference
    file = write(
        "version: 1\nsource: test\nknowledge:\n  same: {family: simile, language: en, "
        'template: "{} is like", answers: city, alike: contry}\n'
    )
    with pytest.raises(KnowledgeError, match=r"mine\.yaml.*knowledge\.same\.alike.*country"):
        Catalogue.load(file)
