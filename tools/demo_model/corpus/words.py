"""What the demo model's world consists of: words, names and the facts it is taught."""

from dataclasses import dataclass, field

NAMES = """Alice Bob Carol David Emma Frank Grace Henry Iris Jack Kate Liam Mia Noah Olivia Paul Quinn Rosa Sam Tina
Uma Victor Wendy Xavier Yara Zoe Anna Ben Clara Daniel Ella Felix Gina Hugo Ivy James Kira Leo Maria Nina Oscar Peter
Rita Simon Tara Vera Walter Aaron Bella Chris Diana Erik Fiona George Helen Ian Julia Kevin Laura Martin Nora Otto Pia
Ralph Sara Tom Ulrich Viola Will Lena Max Lucy Omar Priya Ahmed Mei Yuki Ravi Fatima Ingrid Sven Pablo Carlos Sofia
Luca Marco Elena Ivan Olga Chloe Ethan Mason Ruby Amir Layla Hana Kenji Aisha Tomas Jonas Greta Klaus Bruno Alma""".split()

WORDS = """apple banana bread house water river mountain table chair window garden flower school teacher pencil paper
orange yellow purple green little small large happy friend family mother father sister brother doctor nurse farmer
baker train plane boat car bridge road city village forest tree leaf grass stone sand ocean beach island cloud rain
snow wind storm summer winter spring autumn morning evening night music song dance guitar piano drum book story letter
word number color animal horse sheep tiger lion zebra monkey rabbit mouse eagle parrot turtle shark whale spider butter
cheese sugar salt pepper honey lemon cherry grape melon potato tomato carrot onion rice soup cake cookie coffee tea
milk juice bottle glass spoon fork knife plate kitchen bedroom door floor wall roof lamp candle clock watch phone
camera computer robot rocket planet star moon sun light dark shadow dream smile laugh heart hand finger elbow knee foot
nose mouth tooth ear eye hair shirt dress shoe sock hat coat glove button pocket basket ladder hammer nail wheel engine
market castle dragon queen king prince knight sword magic bicycle elephant umbrella chocolate strawberry pineapple
mushroom butterfly dolphin penguin squirrel hedgehog chicken turkey pigeon feather blanket pillow mirror carpet curtain
drawer cupboard garage balcony museum library theater hospital station airport harbor factory office church temple
tower palace desert valley meadow waterfall volcano glacier lightning thunder rainbow sunrise sunset weekend holiday
birthday wedding present surprise adventure journey ticket suitcase passport compass treasure pirate captain sailor
soldier painter singer dancer writer reader player driver pilot builder carpenter plumber gardener fisherman hunter
shepherd tailor barber butcher lawyer judge engineer scientist student pupil neighbor stranger visitor giant dwarf
witch wizard fairy ghost monster vampire unicorn phoenix language grammar sentence question answer problem solution
example reason result science history physics chemistry biology geography algebra triangle circle square angle
metal silver copper iron wood plastic leather cotton wool silk velvet diamond ruby emerald pearl necklace bracelet
quick quiet brave clever gentle honest lucky polite proud silly simple strange tired useful wonderful beautiful
different difficult important possible early late always never often sometimes together because before after under
between behind through around above below inside outside yesterday today tomorrow machine motor battery cable switch
keyboard screen printer network internet website password message picture video button folder file program""".split()

COLORS = "red blue green yellow purple orange black white pink brown gray gold silver turquoise violet".split()
FOODS = """pizza pasta soup bread rice cake salad cheese sushi curry tacos pancakes noodles dumplings lasagna
chocolate strawberries mangoes""".split()
ANIMALS = "dog cat fox rabbit bear mouse owl horse duck turtle lion frog dragon robot penguin unicorn wolf pig".split()
PLACES = "forest garden village meadow castle beach cave farm city desert library harbor".split()
THINGS = ["red ball", "golden key", "silver bell", "old map", "blue stone", "warm hat", "small boat", "shiny coin"]
JOBS = "teacher doctor nurse farmer baker pilot painter singer writer driver engineer gardener lawyer carpenter".split()
LANGUAGES = "French German Spanish Italian Portuguese Dutch Polish Swedish Greek Turkish Japanese Chinese Korean".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()

_SYLLABLES = [c + v for c in "b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl sh st th tr".split() for v in "aeiou"]


def made_up_word(rng, syllables=(2, 3)):
    """A word that training does not contain: the model must copy or spell it, not remember it."""
    word = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(*syllables)))
    return word + rng.choice(["", "", "n", "r", "s", "l", "x", "t"])


def any_name(rng):
    return rng.choice(NAMES) if rng.random() < 0.7 else made_up_word(rng).capitalize()


@dataclass
class Relation:
    """One kind of fact. `phrases` are noun phrases ("the capital of {k}"), `questions` whole sentences."""

    name: str
    items: list
    phrases: list
    questions: list
    answer: str
    title: str
    famous: set = field(default_factory=set)  # keys that visitors ask first: drawn more often


def _pairs(text):
    return [tuple(part.strip().split(":")) for part in text.replace("\n", " ").split(",")]


CAPITALS = _pairs("""France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Poland:Warsaw,Austria:Vienna,
Hungary:Budapest,Greece:Athens,Ireland:Dublin,Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,
Iceland:Reykjavik,Belgium:Brussels,Switzerland:Bern,Romania:Bucharest,Bulgaria:Sofia,Serbia:Belgrade,Croatia:Zagreb,
Slovenia:Ljubljana,Slovakia:Bratislava,Ukraine:Kyiv,Russia:Moscow,Turkey:Ankara,Egypt:Cairo,Morocco:Rabat,
Algeria:Algiers,Tunisia:Tunis,Libya:Tripoli,Sudan:Khartoum,Ethiopia:Addis Ababa,Kenya:Nairobi,Uganda:Kampala,
Tanzania:Dodoma,Rwanda:Kigali,Ghana:Accra,Nigeria:Abuja,Senegal:Dakar,Mali:Bamako,Angola:Luanda,Zambia:Lusaka,
Zimbabwe:Harare,Namibia:Windhoek,Botswana:Gaborone,Mozambique:Maputo,Madagascar:Antananarivo,Somalia:Mogadishu,
Israel:Jerusalem,Jordan:Amman,Lebanon:Beirut,Syria:Damascus,Iraq:Baghdad,Iran:Tehran,Qatar:Doha,Oman:Muscat,Yemen:Sanaa,
Afghanistan:Kabul,Pakistan:Islamabad,India:New Delhi,Nepal:Kathmandu,Bhutan:Thimphu,Bangladesh:Dhaka,China:Beijing,
Mongolia:Ulaanbaatar,Japan:Tokyo,South Korea:Seoul,North Korea:Pyongyang,Vietnam:Hanoi,Laos:Vientiane,Thailand:Bangkok,
Cambodia:Phnom Penh,Malaysia:Kuala Lumpur,Indonesia:Jakarta,Philippines:Manila,Australia:Canberra,
New Zealand:Wellington,Fiji:Suva,Canada:Ottawa,Mexico:Mexico City,Cuba:Havana,Jamaica:Kingston,Haiti:Port-au-Prince,
Guatemala:Guatemala City,Honduras:Tegucigalpa,Nicaragua:Managua,Panama:Panama City,Colombia:Bogota,Venezuela:Caracas,
Ecuador:Quito,Peru:Lima,Bolivia:La Paz,Chile:Santiago,Argentina:Buenos Aires,Uruguay:Montevideo,Paraguay:Asuncion,
Brazil:Brasilia,Estonia:Tallinn,Latvia:Riga,Lithuania:Vilnius,Malta:Valletta,Cyprus:Nicosia,Albania:Tirana,
the United States:Washington,the United Kingdom:London,England:London,Scotland:Edinburgh,the Netherlands:Amsterdam,
Saudi Arabia:Riyadh,South Africa:Pretoria,Kazakhstan:Astana,Luxembourg:Luxembourg,Georgia:Tbilisi,Armenia:Yerevan""")
COUNTRIES = [country for country, _ in CAPITALS]
CITIES = sorted({city for _, city in CAPITALS if " " not in city and "-" not in city})
# What people type for a country; the answer keeps the full name.
ALIASES = {
    "the United States": ["the USA", "USA", "America", "the US", "the U.S.", "United States"],
    "the United Kingdom": ["the UK", "UK", "Britain", "Great Britain"],
    "the Netherlands": ["Holland", "Netherlands"],
}
_PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
_FAMOUS = set("""France Germany Italy Spain England Japan China India Russia Poland Canada Australia Brazil Egypt Greece
Austria Portugal Sweden Norway Ireland Mexico Turkey""".split()) | {"the United States", "the United Kingdom"}

RELATIONS = [
    Relation("capital", CAPITALS,
             ["the capital of {k}", "the capital city of {k}", "{k}'s capital", "the capital of {k}"],
             ["Which city is the capital of {k}?", "Capital of {k}?", "{k} capital?", "Capital {k}", "{k}: capital?",
              "What city is the capital of {k}?", "What is {k}'s capital called?", "Whats the name of the capital of {k}?"],
             "The capital of {k} is {v}.", "Capital of {k}", _FAMOUS),
    Relation("country", [(v, k) for k, v in CAPITALS if v not in ("London", "Luxembourg")] + [("London", "the United Kingdom")],
             ["the country whose capital is {k}"],
             ["{k} is the capital of which country?", "Which country has the capital {k}?", "{k} is the capital of what?",
              "What country is {k} the capital of?", "Of which country is {k} the capital?", "In which country is {k}?",
              "Where is {k}?", "What country is {k} in?"],
             "{k} is the capital of {v}.", "The Capital {k}", {"Paris", "London", "Berlin", "Rome", "Tokyo", "Madrid"}),
    Relation("symbol", _pairs("""gold:Au,silver:Ag,iron:Fe,copper:Cu,lead:Pb,tin:Sn,oxygen:O,hydrogen:H,carbon:C,nitrogen:N,
helium:He,neon:Ne,sodium:Na,potassium:K,calcium:Ca,zinc:Zn,mercury:Hg,sulfur:S"""),
             ["the chemical symbol for {k}", "the chemical symbol of {k}", "the symbol for {k} in chemistry"],
             ["Which symbol stands for {k}?", "Symbol of {k}?", "{k} chemical symbol"],
             "The chemical symbol for {k} is {v}.", "Chemical Symbol for {k}"),
    Relation("baby", _pairs("""dog:puppy,cat:kitten,cow:calf,horse:foal,sheep:lamb,goat:kid,pig:piglet,duck:duckling,
goose:gosling,swan:cygnet,bear:cub,deer:fawn,frog:tadpole,owl:owlet,kangaroo:joey,hen:chick"""),
             ["the name for a baby {k}", "the word for a baby {k}", "the word for a young {k}"],
             ["What is a baby {k} called?", "What do you call a baby {k}?", "Baby {k} name?", "Baby {k} is called?"],
             "A baby {k} is called a {v}.", "Name of a Baby {k}"),
    Relation("sound", _pairs("""dogs:bark,cats:meow,cows:moo,sheep:bleat,horses:neigh,pigs:oink,ducks:quack,lions:roar,
wolves:howl,bees:buzz,snakes:hiss,owls:hoot,frogs:croak,mice:squeak,crows:caw,doves:coo"""),
             ["the sound of {k}", "the sound that {k} make", "what sound {k} make"],
             ["What sound do {k} make?", "Which sound do {k} make?", "How do {k} sound?", "What do {k} say?"],
             "The sound {k} make is: {v}.", "Sound That {k} Make"),
    Relation("opposite", _pairs("""hot:cold,big:small,fast:slow,up:down,left:right,open:closed,light:dark,wet:dry,young:old,
happy:sad,early:late,hard:soft,high:low,rich:poor,full:empty,day:night,near:far,thick:thin,loud:quiet,clean:dirty,
strong:weak,first:last,true:false,begin:end,love:hate,cold:hot,small:big,slow:fast,old:young,sad:happy,black:white"""),
             ["the opposite of {k}", "the antonym of {k}", "an antonym of {k}"],
             ["Which word means the opposite of {k}?", "Opposite of {k}?", "{k} opposite?", "What is opposite to {k}?"],
             "The opposite of {k} is {v}.", "Opposite of {k}"),
    Relation("currency", _pairs("""Japan:yen,China:yuan,India:rupee,Russia:ruble,Turkey:lira,Poland:zloty,Mexico:peso,
Brazil:real,Switzerland:franc,Thailand:baht,Sweden:krona,South Korea:won,Vietnam:dong,Israel:shekel,Hungary:forint,
Canada:dollar,Germany:euro,France:euro,Italy:euro,Spain:euro,the United States:dollar,the United Kingdom:pound"""),
             ["the currency of {k}", "the money of {k}", "{k}'s currency"],
             ["Which currency is used in {k}?", "What money do people use in {k}?", "{k} currency?", "What currency does {k} use?"],
             "The currency of {k} is the {v}.", "Currency of {k}"),
    Relation("continent", _pairs("""Egypt:Africa,Kenya:Africa,Nigeria:Africa,Ghana:Africa,Morocco:Africa,Japan:Asia,China:Asia,
India:Asia,Nepal:Asia,Vietnam:Asia,France:Europe,Norway:Europe,Poland:Europe,Greece:Europe,Germany:Europe,Italy:Europe,
Spain:Europe,Brazil:South America,Peru:South America,Chile:South America,Canada:North America,Mexico:North America,
Cuba:North America"""),
             ["the continent of {k}", "the continent that {k} is on"],
             ["On which continent is {k}?", "Which continent is {k} on?", "What continent does {k} belong to?", "{k} continent?",
              "Which continent is {k} in?"],
             "{k} is in {v}.", "Continent of {k}"),
    Relation("language", _pairs("""France:French,Germany:German,Italy:Italian,Spain:Spanish,Japan:Japanese,Brazil:Portuguese,
Mexico:Spanish,Portugal:Portuguese,Austria:German,Argentina:Spanish,Poland:Polish,Russia:Russian,Greece:Greek,
Turkey:Turkish,Sweden:Swedish,Egypt:Arabic,England:English,the United States:English,China:Chinese,Hungary:Hungarian"""),
             ["the language of {k}", "the main language of {k}"],
             ["What language do people speak in {k}?", "Which language is spoken in {k}?", "{k} language?"],
             "People in {k} speak {v}.", "Language of {k}"),
    Relation("color", _pairs("""grass:green,the sky:blue,snow:white,coal:black,a ripe banana:yellow,a banana:yellow,blood:red,
a carrot:orange,chocolate:brown,an elephant:gray,a flamingo:pink,an eggplant:purple,milk:white,a lemon:yellow,
a tomato:red,the sun:yellow,the sea:blue,a strawberry:red"""),
             ["the color of {k}", "the usual color of {k}", "the colour of {k}"],
             ["What color is {k}?", "Which color is {k}?", "What colour is {k}?", "What color does {k} have?"],
             "The color of {k} is {v}.", "Color of {k}"),
    Relation("sides", _pairs("triangle:3,square:4,pentagon:5,hexagon:6,heptagon:7,octagon:8,rectangle:4,decagon:10"),
             ["the number of sides of a {k}", "how many sides a {k} has"],
             ["How many sides does a {k} have?", "What number of sides does a {k} have?", "{k} sides?", "How many sides has a {k}?"],
             "A {k} has {v} sides.", "Sides of a {k}"),
    Relation("author", _pairs("""Hamlet:William Shakespeare,Romeo and Juliet:William Shakespeare,Macbeth:William Shakespeare,
Emma:Jane Austen,Pride and Prejudice:Jane Austen,Oliver Twist:Charles Dickens,War and Peace:Leo Tolstoy,
Don Quixote:Miguel de Cervantes,Dracula:Bram Stoker,Frankenstein:Mary Shelley,Moby Dick:Herman Melville,
The Odyssey:Homer,The Raven:Edgar Allan Poe,Faust:Johann Wolfgang von Goethe,The Time Machine:H. G. Wells"""),
             ["the author of {k}", "the writer of {k}"],
             ["Who wrote {k}?", "Which author wrote {k}?", "{k} author?", "{k} was written by whom?", "Who is the writer of {k}?"],
             "{k} was written by {v}.", "Author of {k}"),
    Relation("plural", _pairs("""mouse:mice,child:children,foot:feet,tooth:teeth,goose:geese,man:men,woman:women,leaf:leaves,
knife:knives,box:boxes,city:cities,baby:babies,fish:fish,sheep:sheep,person:people,book:books"""),
             ["the plural of {k}", "the plural form of {k}"], ["Plural of {k}?", "{k} plural?", "What is {k} in the plural?"],
             "The plural of {k} is {v}.", "Plural of {k}"),
    Relation("unit", _pairs("""minutes in an hour:60,seconds in a minute:60,hours in a day:24,days in a week:7,
months in a year:12,days in a year:365,weeks in a year:52,centimeters in a meter:100,meters in a kilometer:1000,
grams in a kilogram:1000,milliliters in a liter:1000,inches in a foot:12,feet in a yard:3,years in a decade:10,
years in a century:100,eggs in a dozen:12,legs on a spider:8,legs on an insect:6,letters in the alphabet:26,
planets in the solar system:8,continents on earth:7,legs on a dog:4,wheels on a car:4"""),
             ["the number of {k}", "how many {k}"],
             ["How many {k}?", "How many {k} are there?", "How many {k}", "{k}: how many?"],
             "The number of {k} is {v}.", "Number of {k}"),
    Relation("day after", [(DAYS[i], DAYS[(i + 1) % 7]) for i in range(7)], ["the day after {k}", "the day that comes after {k}"],
             ["What day comes after {k}?", "Which day follows {k}?", "Day after {k}?"], "The day after {k} is {v}.", "Day After {k}"),
    Relation("day before", [(DAYS[i], DAYS[(i - 1) % 7]) for i in range(7)], ["the day before {k}", "the day that comes before {k}"],
             ["What day comes before {k}?", "Which day precedes {k}?", "Day before {k}?"], "The day before {k} is {v}.", "Day Before {k}"),
    Relation("month after", [(MONTHS[i], MONTHS[(i + 1) % 12]) for i in range(12)], ["the month after {k}"],
             ["What month comes after {k}?", "Which month follows {k}?", "Month after {k}?"], "The month after {k} is {v}.", "Month After {k}"),
    Relation("month before", [(MONTHS[i], MONTHS[(i - 1) % 12]) for i in range(12)], ["the month before {k}"],
             ["What month comes before {k}?", "Which month precedes {k}?", "Month before {k}?"], "The month before {k} is {v}.", "Month Before {k}"),
    Relation("month number", list(zip(ORDINALS, MONTHS)), ["the {k} month of the year", "the {k} month"],
             ["Which month is the {k}?", "Which is the {k} month?"], "The {k} month is {v}.", "The {k} Month"),
    Relation("month length", [(m, str(d)) for m, d in zip(MONTHS, [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])],
             ["the number of days in {k}", "how many days {k} has"],
             ["How many days does {k} have?", "How many days are in {k}?", "Days in {k}?"], "{k} has {v} days.", "Days in {k}"),
    Relation("planet", list(zip(ORDINALS, _PLANETS)), ["the {k} planet from the sun", "the {k} planet"],
             ["Which planet is {k} from the sun?", "Which is the {k} planet?"], "The {k} planet from the sun is {v}.", "The {k} Planet"),
    Relation("record", _pairs("""largest planet:Jupiter,smallest planet:Mercury,biggest planet:Jupiter,largest ocean:the Pacific,
biggest ocean:the Pacific,highest mountain:Mount Everest,tallest mountain:Mount Everest,longest river:the Nile,
largest country:Russia,biggest country:Russia,largest animal:the blue whale,biggest animal:the blue whale,
fastest animal:the cheetah,tallest animal:the giraffe,largest desert:Antarctica,largest continent:Asia,
smallest continent:Australia,nearest star:the sun,red planet:Mars"""),
             ["the {k}", "the {k} in the world", "the name of the {k}"],
             ["Which is the {k}?", "{k}?", "What is the {k} of all?", "Which one is the {k}?"],
             "The {k} is {v}.", "The {k}"),
    Relation("maker", _pairs("""painted the Mona Lisa:Leonardo da Vinci,painted The Starry Night:Vincent van Gogh,
invented the telephone:Alexander Graham Bell,invented the light bulb:Thomas Edison,discovered gravity:Isaac Newton,
discovered America:Christopher Columbus,discovered penicillin:Alexander Fleming,walked on the moon first:Neil Armstrong,
was the first president of the United States:George Washington,developed the theory of relativity:Albert Einstein,
composed the Ninth Symphony:Ludwig van Beethoven,discovered radium:Marie Curie"""),
             ["who {k}", "the person who {k}"], ["Who {k}?", "Which person {k}?", "{k}: who was it?"],
             "{v} {k}.", "Who {k}"),
    Relation("water", _pairs("water boil:100,water freeze:0"), ["at what temperature does {k}"],
             ["At what temperature does {k}?", "At how many degrees does {k}?", "When does {k}?", "What temperature does {k} at?"],
             "It happens at {v} degrees Celsius.", "When Does {k}"),
]
