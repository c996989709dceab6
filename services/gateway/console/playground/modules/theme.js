// Dark or light: the system's, until the user says otherwise.

const THEME = "penstock-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

export function applyTheme() {
  const chosen = localStorage.getItem(THEME);
  document.documentElement.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
}

export function toggleTheme() {
  localStorage.setItem(THEME, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  applyTheme();
}

system.addEventListener("change", applyTheme);
