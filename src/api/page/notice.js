// One line below the header that says what happened, with at most one thing to do about it. It stays until it is
// dismissed, or until the next one takes its place.

const box = document.querySelector("#notice");
const text = box.querySelector("span");
const action = box.querySelector("[data-act=notice]");
let act = () => {};

/** `label` and `does`: what a button offers. */
export function say(message, label = "", does = () => {}) {
  text.textContent = message;
  action.textContent = label;
  action.hidden = !label;
  act = does;
  box.hidden = false;
}

box.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (!button) return;
  box.hidden = true;
  if (button === action) act();
});
