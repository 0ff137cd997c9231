"""The packages of the Python registry from which the demo takes its input, pinned by version and checksum. None of
their files is stored in this repository; each keeps the licence of its own package or site."""

from pipeline.fetch import Package

#: 954 real web pages (front, login, search, contact … pages of many languages) with their URLs
FORMASAURUS = Package("formasaurus", "0.10.0", "formasaurus-0.10.0-py2.py3-none-any.whl",
                      "67296f19fe5cdb7c714795315a6a3cc010f61e803cb9ee8f8c61017f82af51bf", 14_403_770)
#: real article pages: the test inputs of three extraction libraries
TRAFILATURA = Package("trafilatura", "0.8.2", "trafilatura-0.8.2.tar.gz",
                      "90dea0e633ff55c28f8a818988bc8dcbe930df638a7c9bdf541e9815d132fbe3", 2_630_338)
HTMLDATE = Package("htmldate", "0.8.1", "htmldate-0.8.1.tar.gz",
                   "6ce90cde4cc1a01309868b8562e8486f95ceb30f49dc1b43c9824f96716d72ff", 1_185_837)
NEWSPAPER = Package("newspaper4k", "0.9.6", "newspaper4k-0.9.6.tar.gz",
                    "a3f2f0e017dddb6f1019ee77aaa8980e13e6ecea0b949abc7167aae4770d2d0e", 3_998_605)
#: a slice of an English Wikipedia dump
GENSIM = Package("gensim", "4.4.0", "gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
                 "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8", 27_809_988,
                 wheel_for="manylinux_2_28_x86_64")
#: 39,000 licence texts and notices, full of near-duplicates
SCANCODE = Package("scancode-toolkit", "32.5.0", "scancode_toolkit-32.5.0-cp311-none-any.whl",
                   "327d20a0de71d49930d8a6919c2b6d54c2acf4dd0a1d48da9a71dd4ce7b97b78", 126_230_280, wheel_for="any")
#: documentation as reStructuredText
DJANGO = Package("django", "5.1.4", "Django-5.1.4.tar.gz",
                 "de450c09e91879fa5a307f696e57c851955c910a438a35e6b4c895e86bedc82a", 10_716_397)
#: documentation as HTML
SQLALCHEMY = Package("sqlalchemy", "2.0.36", "sqlalchemy-2.0.36.tar.gz",
                     "7f2767680b6d2398aea7082e45a774b2b0767b5c8d8ffb9c8b683088ea9b29c5", 9_574_485)
MAKO = Package("mako", "1.3.5", "Mako-1.3.5.tar.gz",
               "48dbc20568c1d276a2698b36d968fa76161bf127194907ea6fc594fa81f943bc", 392_738)
ALEMBIC = Package("alembic", "1.13.0", "alembic-1.13.0.tar.gz",
                  "ab4b3b94d2e1e5f81e34be8a9b7b7575fc9dd5398fccb0bef351ec9b14872623", 1_208_438)
PYGAME = Package("pygame", "2.6.1", "pygame-2.6.1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
                 "ce8cc108b92de9b149b344ad2e25eedbe773af0dc41dfb24d1f07f679b558c60", 13_977_107,
                 wheel_for="manylinux2014_x86_64")
#: PDF files, many of them odd or damaged on purpose
PYPDF = Package("pypdf", "7.1.0", "pypdf-7.1.0.tar.gz",
                "ca3fa902369e98a6d2cb7b56396de902b72ef9bb3c1e8706c1bfc7d8bd0cf0d7", 7_215_190)
PIKEPDF = Package("pikepdf", "10.17.0", "pikepdf-10.17.0.tar.gz",
                  "de4ccaae83628e86c1fd473b384c09c6ff1dd35a583a8dacbf61d2aa4bea843b", 9_973_818)
OCRMYPDF = Package("ocrmypdf", "17.13.0", "ocrmypdf-17.13.0.tar.gz",
                   "151c35d810eb628fbc5cb9bbe80b834ecf094737efa0e7a2e9e1fac3c730ed49", 7_685_391)

ALL = (FORMASAURUS, TRAFILATURA, HTMLDATE, NEWSPAPER, GENSIM, SCANCODE, DJANGO, SQLALCHEMY, MAKO, ALEMBIC, PYGAME,
       PYPDF, PIKEPDF, OCRMYPDF)
