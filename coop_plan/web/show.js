// Page of `coop-plan show` and `coop-plan place --plot`.

import { mapsView } from "./views.js";

export function start(data) {
  document.querySelector("main").append(mapsView(data.drawings, { link: true }));
}
