// Names for screen readers, and the keyboard's way into wide tables, which the theme leaves out.
function mend() {
  document.querySelector(".md-search").setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((node, i) => node.setAttribute("aria-label", `code ${i + 1}`));
  for (const node of document.querySelectorAll(".md-typeset__scrollwrap")) {
    node.tabIndex = node.scrollWidth > node.clientWidth ? 0 : -1;
  }
}

mend();
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mend);
