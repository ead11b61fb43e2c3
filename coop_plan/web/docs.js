SwaggerUIBundle({ url: "/openapi.json", dom_id: "#docs", deepLinking: true, validatorUrl: null });
// Swagger UI nests links in buttons, and its scrolling examples cannot be reached by keyboard.
const mend = () => {
  for (const link of document.querySelectorAll("button a[href]")) link.removeAttribute("href");
  for (const text of document.querySelectorAll("pre.microlight")) text.tabIndex = 0;
  document.querySelector(".info h1, .info h2")?.setAttribute("aria-level", "2");
};
const docs = document.getElementById("docs");
new MutationObserver(mend).observe(docs, { childList: true, subtree: true });
