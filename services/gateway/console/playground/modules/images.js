// Images that wait to be sent: picked, pasted or dropped. Each is a data URL, for the request has it in itself.

import {h, iconButton, replace} from "./dom.js";
import {notify} from "./notices.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_BYTES = 20 * 1024 * 1024; // as the server's
const MOST = 16; // in one message

export class ImageTray {
  constructor() {
    this.urls = [];
    this.accepts = false;
    this.element = h("ul", {class: "tray", "aria-label": "Images to send"});
    this.input = h("input", {type: "file", accept: TYPES.join(","), multiple: true, hidden: true, "aria-label": "Images", onchange: () => {
      this.add(this.input.files);
      this.input.value = "";
    }});
    this.button = iconButton("image", "Add images", () => this.input.click(), {hidden: true});
    this.#draw();
  }

  // Whether the model sees.
  setAccepts(accepts) {
    this.accepts = accepts;
    this.button.hidden = !accepts;
  }

  async add(files) {
    const images = [...files].filter(file => file.type.startsWith("image/"));
    if (!images.length) return;
    if (!this.accepts) {
      notify("This model reads text only", {isError: true});
      return;
    }
    for (const file of images) {
      if (!TYPES.includes(file.type)) notify(`${file.name}: PNG, JPEG, WebP and GIF are understood`, {isError: true});
      else if (file.size > MAX_BYTES) notify(`${file.name} has more than 20 MiB`, {isError: true});
      else if (this.urls.length >= MOST) notify(`At most ${MOST} images go with a message`, {isError: true});
      else {
        this.urls.push(await dataUrl(file));
        this.#draw();
      }
    }
  }

  // The images, which are no longer here then.
  take() {
    const urls = this.urls;
    this.urls = [];
    this.#draw();
    return urls;
  }

  #draw() {
    this.element.hidden = !this.urls.length;
    replace(this.element, this.urls.map((url, number) => h("li", {}, picture(url, number),
      iconButton("close", `Remove image ${number + 1}`, () => {
        this.urls.splice(number, 1);
        this.#draw();
      }))));
  }
}

// Images are taken from what is pasted into or dropped on an element.
export function takeImages(element, tray) {
  const hasFiles = event => [...(event.dataTransfer?.types ?? [])].includes("Files");
  element.addEventListener("paste", event => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    tray.add(event.clipboardData.files);
  });
  element.addEventListener("dragover", event => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    element.classList.add("is-over");
  });
  element.addEventListener("dragleave", event => {
    if (!element.contains(event.relatedTarget)) element.classList.remove("is-over");
  });
  element.addEventListener("drop", event => {
    element.classList.remove("is-over");
    if (!hasFiles(event)) return;
    event.preventDefault();
    tray.add(event.dataTransfer.files);
  });
}

export function picture(url, number) {
  return h("img", {class: "picture", src: url, alt: `Image ${number + 1}`});
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
