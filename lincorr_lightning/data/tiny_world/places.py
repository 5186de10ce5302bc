"""The real places where the people of the tiny world live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A country of the tiny world; all its names but the landmark's and continent's are one word.

    It is checked against the catalogue when a world is generated. Smaller worlds take the first
    cities.
    """

    country: str
    continent: str
    language: str
    landmark: str
    cities: tuple[str, ...]


PLACES = (
    Place("France", "Europe", "French", "Louvre", ("Paris", "Lyon", "Marseille", "Bordeaux")),
    Place("Germany", "Europe", "German", "Reichstag", ("Berlin", "Munich", "Hamburg", "Dresden")),
    Place("Italy", "Europe", "Italian", "Colosseum", ("Rome", "Milan", "Naples", "Turin")),
    Place("Spain", "Europe", "Spanish", "Alhambra", ("Madrid", "Barcelona", "Seville", "Bilbao")),
    Place("UK", "Europe", "English", "Stonehenge", ("London", "Manchester", "Glasgow", "Oxford")),
    Place("Poland", "Europe", "Polish", "Wawel Castle", ("Warsaw", "Krakow", "Gdansk")),
    Place("Portugal", "Europe", "Portuguese", "Belém Tower", ("Lisbon", "Porto")),
    Place("Greece", "Europe", "Greek", "Parthenon", ("Athens",)),
    Place("Japan", "Asia", "Japanese", "Shibuya Crossing", ("Tokyo", "Kyoto", "Osaka", "Nagoya")),
    Place("China", "Asia", "Chinese", "Terracotta Army", ("Shanghai", "Beijing", "Wuhan")),
    Place("India", "Asia", "Hindi", "Taj Mahal", ("Mumbai", "Delhi", "Chennai", "Kolkata")),
    Place("Turkey", "Asia", "Turkish", "Hagia Sophia", ("Istanbul", "Ankara", "Izmir")),
    Place("Iran", "Asia", "Persian", "Persepolis", ("Tehran",)),
    Place("Indonesia", "Asia", "Indonesian", "Borobudur", ("Jakarta",)),
    Place("Egypt", "Africa", "Arabic", "Sphinx", ("Cairo", "Alexandria")),
    Place("Tunisia", "Africa", "Arabic", "Carthage", ("Tunis",)),
    Place("USA", "North America", "English", "Pentagon", ("Chicago", "Boston", "Seattle")),
    Place("Canada", "North America", "English", "CN Tower", ("Toronto", "Montreal", "Ottawa")),
    Place("Brazil", "South America", "Portuguese", "Copacabana", ("Salvador", "Brasília")),
    Place("Peru", "South America", "Spanish", "Machu Picchu", ("Lima", "Cusco")),
    Place("Chile", "South America", "Spanish", "Easter Island", ("Santiago",)),
    Place("Australia", "Oceania", "English", "Uluru", ("Sydney", "Melbourne", "Perth")),
)
"""Countries on six continents, with one city or several."""
