// Creates elements. Text is always inserted as text, never as HTML.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) {
      element.addEventListener(key.slice(2), value);
    } else if (value === true) {
      element.setAttribute(key, "");
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(key, value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function time(seconds) {
  return seconds === null || seconds === undefined ? "–" : new Date(seconds * 1000).toLocaleString();
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) {
    return "–";
  }
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export function status(task) {
  return h("span", { class: `status ${task.status}` }, task.status.replace("_", " "));
}
