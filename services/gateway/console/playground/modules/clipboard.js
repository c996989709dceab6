// Copying, also where the page came by plain HTTP from another machine and browsers offer no clipboard.

import {notify} from "./notices.js";

const SHOWN_MS = 1500;

// The button that was pressed says that it is done.
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.classList.add("is-done");
    setTimeout(() => button.classList.remove("is-done"), SHOWN_MS);
  } catch {
    notify("This browser lets only pages by HTTPS, or of this machine, copy");
  }
}
