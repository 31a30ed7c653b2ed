"""A style sheet that parses each source once for a theme."""

from textual.css.stylesheet import Stylesheet


class KeptStylesheet(Stylesheet):
    """Textual parses every source anew when a screen is opened for the first time, although only a theme changes what
    the text says. The sources here are fixed, so what was parsed with the same variables still holds."""

    def set_variables(self, variables: dict[str, str]) -> None:
        """Set the variables of the theme; other variables than before forget what was parsed."""
        if variables != self._variables:
            super().set_variables(variables)

    def reparse(self) -> None:
        """Parse the sources that were not parsed with these variables."""
        self.parse()
