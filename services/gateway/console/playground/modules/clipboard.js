// Copying, also where the page came by plain HTTP from another machine and browsers offer no clipboard.

import {notify} from "./notices.js";

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    notify("Copied");
  } catch {
    notify("This browser lets only pages by HTTPS, or of this machine, copy");
  }
}
